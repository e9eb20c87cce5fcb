"""MovieLens-style ratings: CSV with the columns ``userId,movieId,rating,timestamp`` (seconds), in any order."""

from userkv.logs.csv_log import CsvLog

RATINGS = CsvLog(user="userId", item="movieId", time="timestamp", units_per_second=1.0, numeric=("rating",))
