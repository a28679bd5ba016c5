"""What a process serves about itself over HTTP: health, readiness and metrics."""
