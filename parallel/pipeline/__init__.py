"""Pipelines over torch's schedules: stages, their partition, and the timeline of a schedule."""
