"""Training of ranking models in plain PyTorch: from a log of what users did to a directory that can be served.

Nothing here imports vLLM. The order of reading: :mod:`logs` (a log becomes histories with labels), :mod:`batches`
(histories become training sequences), :mod:`packed` (the model on such a sequence), :mod:`trainer`, :mod:`evaluate`,
:mod:`export`.
"""
