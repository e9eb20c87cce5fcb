"""The table in ``engine/vllm_compat/__init__.py`` names what is replaced, and nothing else."""

import re

from userkv.engine import vllm_compat
from userkv.engine.vllm_compat import patches


def test_the_table_names_every_replacement_and_no_other() -> None:
    assert vllm_compat.__doc__ is not None
    first_cells = re.findall(r"^\| (``.*?``.*?) \|", vllm_compat.__doc__, re.MULTILINE)
    documented = set()
    for cell in first_cells:
        first, *others = re.findall(r"``(.*?)``", cell)
        owner = first.rpartition(".")[0]
        documented |= {first, *(f"{owner}.{other}" for other in others)}
    replaced = {f"{owner.__name__.removeprefix('vllm.v1.')}.{name}" for owner, name, _ in patches.replacements()}
    assert documented == {name.removeprefix("vllm_v1.") for name in replaced}
