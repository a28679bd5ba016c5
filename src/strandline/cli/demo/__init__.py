"""The demonstration: a pipeline that is killed at its worst moments, beside a naive twin."""
