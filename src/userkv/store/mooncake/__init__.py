"""Users' KV in Mooncake Store: a pool that several machines share."""
