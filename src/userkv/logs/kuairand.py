"""KuaiRand logs: CSV with ``user_id``, ``video_id``, ``time_ms`` among other columns, found by their names.

Every row is an event, clicked or not: generative recommenders read exposures too.
"""

from userkv.logs.csv_log import CsvLog

KUAIRAND = CsvLog(user="user_id", item="video_id", time="time_ms", units_per_second=1000.0)
