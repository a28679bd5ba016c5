"""From records to rows: kinds of tables, decoding, column types, bad records. Pure functions on Arrow."""
