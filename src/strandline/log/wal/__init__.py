"""Write-ahead log on the local disk: durable when an append returns, one writing process, any number of readers."""
