"""Program: what each class of ranks does in a step, as lists of actions; emitters, passes and schedules."""
