"""What a pool holds of a user: the record and its keys, and what to load and to save. Pure, no I/O."""
