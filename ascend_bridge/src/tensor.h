// What the bridge knows of a tensor in device memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "acl_min.h"

namespace deepinfer::ascend {

using Dims = std::vector<int64_t>;

struct Tensor {
  DataType dtype = DataType::kFloat;
  Dims dims;
  void* address = nullptr;
  Format format = Format::kNd;
  Dims strides;  // in elements; empty: contiguous
  Dims storage;  // dims of the stored form when it differs from `dims` (FRACTAL_NZ)
};

// Elements of a shape; 1 for a scalar.
int64_t CountOf(const Dims& dims);

// Bits of one element: 4 for the packed types.
int64_t BitsOf(DataType dtype);

// Bytes of a contiguous tensor; dims of packed types count elements, two for each byte, and an odd count is rounded up.
int64_t BytesOf(DataType dtype, const Dims& dims);

// "(2, 512)".
std::string DimsText(const Dims& dims);

}  // namespace deepinfer::ascend
