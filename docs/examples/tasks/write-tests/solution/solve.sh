#!/bin/bash
set -e
cat >test_intervals.py <<'PYTHON'
import unittest

from intervals import merge, size


class Merge(unittest.TestCase):
    def test_order_does_not_count(self):
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])

    def test_overlapping_and_touching_become_one(self):
        self.assertEqual(merge([(1, 4), (3, 6)]), [(1, 6)])
        self.assertEqual(merge([(1, 2), (3, 4)]), [(1, 4)])
        self.assertEqual(merge([(1, 2), (4, 5)]), [(1, 2), (4, 5)])

    def test_one_inside_another(self):
        self.assertEqual(merge([(1, 9), (2, 3)]), [(1, 9)])

    def test_what_is_no_interval(self):
        with self.assertRaises(ValueError):
            merge([(2, 1)])


class Size(unittest.TestCase):
    def test_both_ends_count(self):
        self.assertEqual(size([(1, 3)]), 3)

    def test_no_number_counts_twice(self):
        self.assertEqual(size([(1, 3), (2, 4)]), 4)
PYTHON
