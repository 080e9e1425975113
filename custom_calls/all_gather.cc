// X of every device of a group, one behind the other in the order of ranks.
#include "collective.h"

namespace deepinfer::custom_calls {
namespace {

std::vector<Tensor> Infer(const Request& request) {
  Dims dims = request.in(0).dims;
  const int64_t size = NeedGroup(request);
  dims[0] *= size;
  return {ResultOf(request.in(0).dtype, dims)};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Tensor& x = request.in(0);
  const HcclComm comm = CommunicatorOf(request, call).comm;
  ascend::CheckCollective(call.collectives().HcclAllGather(x.address, results[0].address, ascend::CountOf(x.dims),
                                                           HcclTypeOf(x.dtype), comm, call.device().stream()),
                          "HcclAllGather");
  call.device().Enqueued("HcclAllGather");
}

}  // namespace

const Target& AllGatherTarget() {
  static const Target target{"deepinfer.cann.all_gather.v2",
                             "DeepinferAllGather",
                             "x of every device of a group, one behind the other in the order of ranks",
                             {},
                             {{"x", CollectiveTypes(), "(N, ...), equal on all devices of a group"}},
                             GroupAttributes(),
                             {{"y", "(size * N, ...)"}},
                             false,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
