"""Changes the prefill context-parallel degree of a running, unmodified SGLang server.

Loaded by SGLang itself (`entry.register`, entry point `sglang.srt.plugins`) in each of its processes. The words used here:

*unit*        one attention-TP replica of the server, numbered from 0. The server is launched with every unit on its own.
*composition* degrees of the groups of units from unit 0 up, as everywhere in the project: (2, 1, 1).
*leader*      a group's first unit. It reads requests and answers them; *followers* compute what it tells them.
*touched*     units whose group differs between two compositions. All others serve through a switch.

A switch is `prepare` (nothing changes; work for touched units waits in SGLang's data-parallel controller, under a lease),
`commit` (touched units vote through a store and all take the one decision, whatever becomes of any of them), `release`
(work flows, by the composition that is now in force). No collective is used for a decision, so an abort leaves every
process group as it was.
"""
