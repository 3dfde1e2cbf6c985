"""What is learned: the error of the network's output at a random noise level."""
