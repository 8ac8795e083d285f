"""Train on tasks of Harbor: its trials run in processes with an interpreter of their own."""
