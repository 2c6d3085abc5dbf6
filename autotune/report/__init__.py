"""What a person reads: computed here, shown by the command line."""
