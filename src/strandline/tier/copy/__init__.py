"""The tierer: copies closed ranges to segments, truncates other histories, deletes expired segments."""
