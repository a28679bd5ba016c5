"""The Delta table sink: rows and cursor in one commit of the table."""
