// What the operators of the simulator are made of: argument checks of the first phase, queued work of the second.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "../src/acl_min.h"
#include "numbers.h"
#include "state.h"

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

// The second phase of an operator, which is the same for all.
#define SIM_PHASE_TWO(name)                                                                                   \
  SIM_EXPORT aclnnStatus name(void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream) { \
    return ascend_sim::Launch(#name, workspace, bytes, executor, stream);                                     \
  }

struct aclTensor {
  ascend_sim::DataType dtype;
  std::vector<int64_t> dims;
  std::vector<int64_t> strides;
  int64_t offset;
  int32_t format;
  std::vector<int64_t> storage;
  void* address;

  int64_t rank() const { return static_cast<int64_t>(dims.size()); }
  int64_t count() const;
  int64_t dim(int64_t index) const { return dims[index < 0 ? index + rank() : index]; }
};

struct aclTensorList {
  std::vector<const aclTensor*> members;
};

struct aclIntArray {
  std::vector<int64_t> values;
};

namespace ascend_sim {

using Dims = std::vector<int64_t>;

// A first phase that says no.
struct Refusal {
  int32_t status;
  std::string text;
};

// Values of a tensor in the order of its dims.
using Values = std::vector<double>;

// The memory of the device during the second phase.
class Memory {
 public:
  explicit Memory(Heap& heap) : heap_(heap) {}
  Values Load(const aclTensor& tensor) const;
  // Rounds each value to the tensor's type.
  void Store(const aclTensor& tensor, const Values& values) const;
  // The bytes behind a contiguous tensor.
  char* Bytes(const aclTensor& tensor) const;

 private:
  Heap& heap_;
};

// What the first phase of one call found out.
class Plan {
 public:
  explicit Plan(std::string name) : name_(std::move(name)) {}

  // Throws 161001 when a named tensor is null.
  void NotNull(std::initializer_list<std::pair<const char*, const void*>> arguments) const;
  // Throws 161002 unless the tensor has one of the types, a ND format, and lies contiguous or is a transposed matrix.
  void Type(const char* what, const aclTensor* tensor, std::initializer_list<DataType> allowed) const;
  void Shape(const char* what, const aclTensor* tensor, const Dims& wanted) const;
  // Throws 161002, or 561002 for a limit that only tiling knows.
  void Require(bool holds, const std::string& text) const;
  void RequireTiling(bool holds, const std::string& text) const;
  // Remembers what was received, for the test of argument widths.
  void Attribute(const char* what, double value);
  // Declares that the second phase touches the tensor's memory.
  void Touches(std::initializer_list<const aclTensor*> tensors);
  // The second phase. Throws Refusal for what a device would find out.
  void Work(std::function<void(const Memory&)> work) { work_ = std::move(work); }

 private:
  friend aclnnStatus Prepare(const char*, uint64_t*, aclOpExecutor**, const std::function<void(Plan&)>&);

  std::string name_;
  std::map<std::string, double> attributes_;
  std::vector<Range> ranges_;
  std::function<void(const Memory&)> work_;
};

// Runs the checks of a first phase; the executor owns copies of everything that the second one needs.
aclnnStatus Prepare(const char* name, uint64_t* bytes, aclOpExecutor** executor,
                    const std::function<void(Plan&)>& checks);
aclnnStatus Launch(const char* name, void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream);

int64_t CountOf(const Dims& dims);
std::string DimsText(const Dims& dims);

}  // namespace ascend_sim
