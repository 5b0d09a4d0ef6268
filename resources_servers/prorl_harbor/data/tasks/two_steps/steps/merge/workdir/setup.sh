seq 5 20 105 > second.txt
