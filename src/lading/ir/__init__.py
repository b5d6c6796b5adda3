"""The data that everything else is about: graph, machine, action, program, plan, timeline. No torch."""
