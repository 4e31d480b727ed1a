"""The mathematics of rows of logits, stored or made by a head, and what a backend must offer; no public function."""
