"""Pipelines over torch's schedules: stages, their partition, and what a schedule does when."""
