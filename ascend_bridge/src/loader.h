// Finding CANN's libraries, or the simulator, and looking up their functions.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "acl_min.h"

namespace deepinfer::ascend {

// Where to look. The bridge itself never reads the environment.
struct LoaderOptions {
  std::string simulator;       // path of the simulator; not empty: it and nothing else
  std::string library_dir;     // a folder that holds all libraries
  std::string home_dir;        // CANN's installation root; its lib64/ is searched
  std::string accept_version;  // a CANN version outside of the table's range that is accepted by name
};

struct Symbol {
  void* address = nullptr;  // nullptr: no library has it
  std::string library;      // path of the library that defines it
};

#define DEEPINFER_MEMBER(name, type) std::add_pointer_t<type> name = nullptr;
struct Api {
  DEEPINFER_RUNTIME_FUNCTIONS(DEEPINFER_MEMBER)
  DEEPINFER_OBJECT_FUNCTIONS(DEEPINFER_MEMBER)
};
struct CollectiveApi {
  DEEPINFER_COLLECTIVE_FUNCTIONS(DEEPINFER_MEMBER)
};
#undef DEEPINFER_MEMBER

// The loaded libraries. Libraries stay loaded until the process ends.
class Libraries {
 public:
  // Loads by the search order simulator, library_dir, home_dir/lib64, default path; the first place whose runtime
  // library loads wins. Throws NOT_FOUND with every place that was tried, UNIMPLEMENTED when a function is missing.
  explicit Libraries(const LoaderOptions& options);

  const Api& api() const { return api_; }
  bool is_simulator() const { return is_simulator_; }
  const std::vector<std::string>& paths() const { return paths_; }

  // The collectives, whose library is loaded at the first call; throws NOT_FOUND or UNIMPLEMENTED.
  const CollectiveApi& collectives();

  // The function of this name in an operator library; an absent one is remembered as absent.
  Symbol Find(const std::string& name);

 private:
  bool TryFolder(const std::string& folder, std::string& attempts);
  void OpenOperators(const std::string& folder);
  void ResolveApi();

  Api api_;
  CollectiveApi collective_api_;
  void* collective_library_ = nullptr;
  std::string folder_;  // where the runtime library was found; empty for the default search path
  bool is_simulator_ = false;
  void* runtime_ = nullptr;
  std::vector<void*> operators_;
  std::vector<std::string> paths_;
  std::mutex mutex_;
  std::map<std::string, Symbol> symbols_;
};

}  // namespace deepinfer::ascend
