"""Tables that follow a log: rows and cursor in one commit, written by any number of workers."""
