// tests/simt/cooperative_groups.h - nothing: clusters have one block there (ops_block.cuh).
#pragma once
