// One call of an operator or of a few in a row: descriptors, workspace, both phases.
#pragma once

#include <string>
#include <vector>

#include "runtime.h"

namespace deepinfer::ascend {

template <class T>
struct Same {
  using type = T;
};

// Objects that a call made are destroyed with it; device memory is the arena's. The device's mutex is held throughout.
class Call {
 public:
  Call(Runtime& runtime, Device& device) : runtime_(runtime), device_(device) {}
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // A tensor in the arena.
  Tensor Temporary(DataType dtype, const Dims& dims);

  // A contiguous descriptor of the tensor, or of its bytes seen as another type and shape.
  aclTensor* Describe(const Tensor& tensor);
  aclTensor* Describe(const Tensor& tensor, DataType dtype, const Dims& dims);
  // A matrix seen with rows and columns exchanged; no data moves.
  aclTensor* DescribeTransposed(const Tensor& matrix);
  // A list of one tensor; the list destroys the descriptor.
  aclTensorList* DescribeList(const Tensor& tensor);
  aclIntArray* IntArray(const std::vector<int64_t>& values);

  // Checks the arguments, takes the workspace from the arena and enqueues the operator.
  template <class... Arguments>
  void Run(const Operator<Arguments...>& op, typename Same<Arguments>::type... arguments) {
    const ResolvedOperator found = runtime_.Resolve(op.name);
    using PhaseOne = typename Operator<Arguments...>::PhaseOne;
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    const auto prepare = reinterpret_cast<PhaseOne*>(found.phase_one);
    device_.Check(prepare(arguments..., &bytes, &executor), std::string(op.name) + " (checking arguments)");
    void* workspace = TakeWorkspace(bytes, executor);
    const auto enqueue = reinterpret_cast<PhaseTwo*>(found.phase_two);
    device_.Check(enqueue(workspace, bytes, executor, device_.stream()), op.name);
    device_.Enqueued(op.name);
  }

  Device& device() { return device_; }
  // The library of collectives, and this device's place in a family of groups.
  const CollectiveApi& collectives() { return runtime_.libraries().collectives(); }
  Communicator communicator(int64_t family) { return runtime_.groups().Find(family, device_.ordinal()); }

 private:
  void* TakeWorkspace(uint64_t bytes, aclOpExecutor* executor);

  Runtime& runtime_;
  Device& device_;
  std::vector<aclTensor*> tensors_;
  std::vector<aclTensorList*> lists_;
  std::vector<aclIntArray*> arrays_;
};

}  // namespace deepinfer::ascend
