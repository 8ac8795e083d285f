"""`rolloutmq report`: a run's folder as one static page."""
