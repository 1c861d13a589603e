"""The shaped network: hosts as network namespaces, bridges between them, `tc tbf` on links."""
