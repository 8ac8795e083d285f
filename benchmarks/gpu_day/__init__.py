"""`make gpu-day`: what one CUDA GPU shows in at most 25 minutes, as a report with verdicts."""
