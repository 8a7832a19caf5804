"""How far a pull, a load or a batch is, shown on standard error: for the command line and the library alike."""
