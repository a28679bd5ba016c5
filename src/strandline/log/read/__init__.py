"""Reading, the same for every log: plans, fetching ahead, decoded values."""
