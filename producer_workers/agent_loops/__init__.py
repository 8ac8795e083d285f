"""What a worker does with one group: how its rollouts are generated and judged."""
