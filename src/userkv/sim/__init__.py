"""What a cache of users would do with a trace, without an engine: the code of core/, on blocks that hold nothing."""
