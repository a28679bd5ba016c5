"""The read path of a write-ahead log: finding frames, reading spans, and the watermark of what is readable."""
