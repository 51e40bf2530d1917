"""Which tile a program computes."""
