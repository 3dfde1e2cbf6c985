"""What is trained: small modules beside frozen layers. One file a method."""
