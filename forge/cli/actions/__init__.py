"""The actions of the commands, in the modules and under the names that declare them. Only a command that runs imports
these."""
