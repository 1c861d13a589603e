"""Ring collectives as steps: chunks go round a ring, rank by rank, over the links of the cluster.

In each step every rank sends a chunk to the next rank. It does so once it has received the chunk,
its own last send is over, and the next rank is there. So a late rank is felt hop by hop, and a hop
over a busy link holds up those that come after it. Each rank's part in a collective is a process of
simpy, and each link that several rings want is a resource.
"""
