#!/bin/bash
tr 'A-Z' 'a-z' < /app/notes.txt | grep -o '[a-z]*' | sort | uniq -c | awk '{ print $2 "," $1 }' > /app/counts.csv
