"""From groups to new weights: advantages, losses, and the steps of policy and critic."""
