"""What peers need to run at all on this machine."""
