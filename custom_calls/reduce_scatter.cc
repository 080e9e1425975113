// One part of the sum of x over the devices of a group, parts in the order of ranks.
#include "collective.h"

namespace deepinfer::custom_calls {
namespace {

std::vector<Tensor> Infer(const Request& request) {
  const int64_t size = NeedGroup(request);
  request.NeedMultiple(0, 0, size);
  Dims dims = request.in(0).dims;
  dims[0] /= size;
  return {ResultOf(request.in(0).dtype, dims)};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Tensor& x = request.in(0);
  const HcclComm comm = CommunicatorOf(request, call).comm;
  ascend::CheckCollective(
      call.collectives().HcclReduceScatter(x.address, results[0].address, ascend::CountOf(results[0].dims),
                                           HcclTypeOf(x.dtype), ascend::kHcclSum, comm, call.device().stream()),
      "HcclReduceScatter");
  call.device().Enqueued("HcclReduceScatter");
}

}  // namespace

const Target& ReduceScatterTarget() {
  static const Target target{"deepinfer.cann.reduce_scatter.v2",
                             "DeepinferReduceScatter",
                             "one part of the sum of x over the devices of a group, parts in the order of ranks",
                             {},
                             {{"x", CollectiveTypes(), "(N, ...), equal on all devices of a group"}},
                             GroupAttributes(),
                             {{"y", "(N / size, ...)"}},
                             false,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
