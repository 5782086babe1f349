# cmake --install: the library, its public headers, the command line, and what find_package(ballast) needs.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ballast)

# An installed program finds the LibTorch that it was built with, also in a .venv inside the sources, which
# INSTALL_RPATH_USE_LINK_PATH leaves out.
set_target_properties(ballast PROPERTIES INSTALL_RPATH "${TORCH_INSTALL_PREFIX}/lib")
install(TARGETS ballast EXPORT ballastTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT ballastTargets NAMESPACE ballast:: DESTINATION ${package_dir})

get_property(public_headers GLOBAL PROPERTY BALLAST_PUBLIC_HEADERS)
foreach(header IN LISTS public_headers)
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${PROJECT_SOURCE_DIR}/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
endforeach()

# A library and a LibTorch of other versions don't fit each other, so the package looks first where this one was found.
configure_package_config_file(cmake/ballastConfig.cmake.in ${CMAKE_BINARY_DIR}/ballastConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/ballastConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/ballastConfig.cmake ${CMAKE_BINARY_DIR}/ballastConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/BallastLibTorch.cmake ${PROJECT_SOURCE_DIR}/tools/find_torch.py
        DESTINATION ${package_dir})

if(TARGET ballast_cli)
  set_target_properties(ballast_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${TORCH_INSTALL_PREFIX}/lib")
  install(TARGETS ballast_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
