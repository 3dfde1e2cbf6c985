"""The loss: the error of the network's output at a random sigma."""
