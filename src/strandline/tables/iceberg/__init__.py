"""The Iceberg table sink: rows and cursor in one snapshot of the table."""
