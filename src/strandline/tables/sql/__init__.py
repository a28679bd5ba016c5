"""Tables in SQL databases: rows, dead letters and cursor in one transaction of the database."""
