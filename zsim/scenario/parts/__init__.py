"""The parts of a scenario, each made of its table: model, cluster, mesh, what is trained."""
