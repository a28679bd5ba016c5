"""Pipelines that follow a log into a table: the driver plans and commits, executors write."""
