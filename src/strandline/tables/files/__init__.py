"""Tables of data files, whatever their format: layout by key hash, the part of a worker, the base class of sinks."""
