"""`attnlab compare --targets`: the goals of attnlab beside what users could choose instead."""
