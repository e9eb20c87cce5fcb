"""What scheduler and workers send each other: jobs within a step, and the lookup RPC."""
