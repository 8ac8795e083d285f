"""What a group is: ids, rollouts, limits, staleness, order policies and the wire format."""
