"""What the consistency-model examples share: data, figures and quality in numpy, the rest per framework."""
